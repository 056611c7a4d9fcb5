"""Random calls: valid ones against the reference, wrong ones against what they must say.

A module of this package adds classes of cases with a dict CASES: there is no other list.
"""
