"""Graphs as flat arrays: building, validation, conversion, and the facts about them that the scheduler needs."""
