"""The files for spark-submit.

They are in a directory of their own, as Python puts a script's directory first on its path.
"""
