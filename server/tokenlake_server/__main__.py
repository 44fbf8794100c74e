"""`python -m tokenlake_server`: the same as `tokenlake serve`."""

from tokenlake.command import end_at_sigterm

if __name__ == "__main__":
    end_at_sigterm()
    from tokenlake_server.cli import serve

    serve(prog_name="tokenlake serve")
