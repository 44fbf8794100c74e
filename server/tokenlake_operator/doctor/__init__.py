"""`tokenlake doctor`: checks of a node before and while it runs. Each check yields findings, each with its cure.

::

    command.py      the command: settings, daemon, the checks below, the output
    machine.py      kernel, memory, limits, huge pages          before the start
    places.py       ports, sockets, directories                 before the start
    settings.py     settings that are accepted, and unwise
    certificates.py the files of certificates
    membership.py   etcd, the addresses of other nodes
    running.py      the state of one node that answers, and engines beside it that go without the pool
    cluster.py      nodes that answer, compared                 clocks, settings, secrets, members, paths
    layouts.py      layouts of connected engines, compared
    pages.py        the page of the documentation for each check
"""
