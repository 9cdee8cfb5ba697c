"""`python -m moe_placement` is `moe-plan`."""

from moe_placement.command.main import main

if __name__ == "__main__":
    main()
