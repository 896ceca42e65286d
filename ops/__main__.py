"""`python -m ops` is the `gateway` command."""

from ops.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
