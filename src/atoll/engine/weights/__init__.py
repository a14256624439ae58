"""Where weights come from and how a stage reads its share of them."""
