"""What a run leaves behind: typed records and the folder that holds them."""
