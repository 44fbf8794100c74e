"""`tokenlake bench paper`: the systems of the TokenLake paper (arXiv 2508.17219) beside this pool, by simulation."""
