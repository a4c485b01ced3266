"""Where π⁺'s images come from, and the folder they are kept in."""
