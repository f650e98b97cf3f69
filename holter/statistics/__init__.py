"""What is measured of a tensor: rows and histograms, here in numpy, and the backends that fill them."""
