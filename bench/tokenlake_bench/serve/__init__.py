"""`tokenlake bench serve`: a load on servers that run already, over the OpenAI API, and the sources of tokens."""
