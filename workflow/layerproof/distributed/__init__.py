"""The process group of a job; this package depends only on torch and imports no other part of Layerproof."""

DEADLINE = "LAYERPROOF_WATCH_DEADLINE"
"""The variable with the seconds that ranks of a watched program may be apart; without it they have torch's half an hour."""
