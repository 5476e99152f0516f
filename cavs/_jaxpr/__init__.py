"""Toolkit for jaxprs: walks, inlines, cuts and runs their equations, and gives calls rules of their own. Knows nothing of F."""
