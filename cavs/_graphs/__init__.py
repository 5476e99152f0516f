"""Graphs as flat arrays: made, checked and converted, with what scheduling must know of each."""
