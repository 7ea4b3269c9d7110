"""`python -m cdr_kernel` is the command `cdr`."""

from __future__ import annotations

from cdr_kernel.cli._app import main

if __name__ == "__main__":
    main()
