"""The sections of ``check_cuda.py``, each run in a process of its own."""
