"""``python -m dropmax`` is ``dropmax``; torchrun needs the module."""

from dropmax.cli import main

if __name__ == "__main__":
    main()
