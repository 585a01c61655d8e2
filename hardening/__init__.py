"""Campaigns that try to break dropmax, and count what happened: ``python -m hardening``, ``make harden``."""
