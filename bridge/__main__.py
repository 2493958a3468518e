"""`python -m bridge` is `bridge-rl`."""

from bridge.cli import main

if __name__ == "__main__":
    main()
