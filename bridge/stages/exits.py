"""The exit codes of a stage process. Anything else means that it failed."""

EXIT_SEALED = 0
EXIT_FAILED = 1
EXIT_REQUEUE = 75
"""Stopped early and saved; to be started again (EX_TEMPFAIL of sysexits.h)."""
