"""Measures what the router costs, beside other P/D routers, against engines that cost nothing."""
