"""Ingress: a request is checked, named and registered before the scheduler sees it.

Knows sampling parameters, stop-regex admission, requests and registration. Must not know how tokens
become text or how a response is delivered.
"""
