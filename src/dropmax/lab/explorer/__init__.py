"""The explorer: a local web page to look at a trained model, from ``dropmax explore RUN``.

``model.py`` answers questions about a run, ``app.py`` puts them behind addresses, ``guard.py`` and ``server.py`` keep
strangers and accidents out, and ``static/`` is the page. The extra ``explore`` brings the server.
"""

from __future__ import annotations

from dropmax.lab.explorer.model import Explorer

__all__ = ["Explorer"]
