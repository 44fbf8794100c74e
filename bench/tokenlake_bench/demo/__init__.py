"""`tokenlake demo`: three daemons and two engines that share one cache."""
