"""How processes find each other, talk before any collective runs, and end with the process that started them."""
