"""Write the graph of all towers and of home, with the exchanges between them."""
