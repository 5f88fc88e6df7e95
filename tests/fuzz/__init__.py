"""Fuzzing of everything that reads what others wrote: a value, or one clear line, and nothing else may come out.

`python -m tests.fuzz --seconds 60` (`make fuzz`) is the long form of tests/unit/test_fuzz.py.
"""
