"""`python -m atoll.cli.nursery`: a local cluster's processes are forked from this one."""

from atoll.cli.app import main
from atoll.runtime.nursery import serve

if __name__ == "__main__":
    serve(main)
