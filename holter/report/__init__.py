"""A run as one page: its verdict, its findings, the strip charts of its layers."""
