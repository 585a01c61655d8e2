"""How long a campaign runs: ``DROPMAX_ROUNDS=100 pytest -m slow tests/slow`` does a hundred times the short form."""

import os

ROUNDS = int(os.environ.get("DROPMAX_ROUNDS", "1"))
