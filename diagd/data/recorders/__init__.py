"""Recorders: clips of a game, mp4 with a jsonl of actions beside each; one file a kind of game."""
