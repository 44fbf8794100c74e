"""`tokenlake bench restart`: a cluster with disks under load, whose daemons are ended by SIGTERM and SIGKILL, one after
the other and all at once, and started again."""
