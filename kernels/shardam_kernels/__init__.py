"""Arithmetic and storage of embedding rows: NumPy reference, native code, and what both share. Imports nothing by itself."""
