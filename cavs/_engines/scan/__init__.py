"""Engine `scan`: runs levels as a `lax.scan` in XLA. Works on every device."""
