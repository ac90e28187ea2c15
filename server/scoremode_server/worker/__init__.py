"""Rows in an engine worker: the specification of a request's rows, their computation in the steps of both model
runners, and the LM head.
"""
