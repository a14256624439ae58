"""Files that problems come from: fleet files, clusters in them, and other systems' formats."""
