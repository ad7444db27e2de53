"""Factors, decompositions and directions against dense linear algebra."""
