"""`python -m tokenlake_server`: the same as `tokenlake serve`."""

from tokenlake_server.cli import serve

if __name__ == "__main__":
    serve(prog_name="tokenlake serve")
