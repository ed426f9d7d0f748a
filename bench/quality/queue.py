"""The queue of quality runs: queue.toml worked off by priority, as far as the time goes.

    python bench/quality/queue.py main --data DIR                    # the main table; says first how long it takes
    python bench/quality/queue.py main methods --data DIR --minutes 25 --compiled
    python bench/quality/queue.py --list

`worklist.py` has the code. This file has the name of a module of the standard library and lies beside scripts, which would find
it in that module's place; imported by that name it is that module.
"""

import sys

if __name__ == "queue":
    import importlib.util
    import os

    _spec = importlib.util.spec_from_file_location("queue", os.path.join(os.path.dirname(os.__file__), "queue.py"))
    assert _spec is not None and _spec.loader is not None
    sys.modules["queue"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["queue"])
elif __name__ == "__main__":
    from worklist import main

    sys.exit(main(sys.argv[1:]))
