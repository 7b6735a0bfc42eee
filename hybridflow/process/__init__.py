"""How processes find each other, exchange texts outside of the training's collectives, and end with
their parents."""
