"""Entry point of `python -m ops`, which runs the `gateway` command."""

from ops.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
