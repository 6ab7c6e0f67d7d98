"""`radixkv` with a fake engine in the real one's place: `python serve_fake.py DELAY_S serve --port 0`.

Requests take DELAY_S seconds.
"""

import sys
import types

from fake_engine import FakeEngine


def build_engine(config, observer):
    """Stand in for `radixkv.startup.build_engine.build_engine`."""
    delay_s = float(sys.argv[1])
    return FakeEngine(is_gated=delay_s > 0, delay_s=delay_s)


if __name__ == "__main__":
    stand_in = types.ModuleType("radixkv.startup.build_engine")
    stand_in.build_engine = build_engine
    sys.modules["radixkv.startup.build_engine"] = stand_in
    from radixkv.service.commands.cli import main

    sys.exit(main(sys.argv[2:]))
