"""The command line's options, help texts, suggestions, tab completion and signals. Nothing here imports JAX."""
