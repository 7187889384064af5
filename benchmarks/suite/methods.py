"""Names of the methods of table T6, for those who measure and those who lay out; needs nothing."""

OFF, EXACT, VERIFIED, SUBSTITUTED = "off", "exact prefixes", "verified", "similar text's K/V"
ALL_SUITES = "all"
"""Name of the rows over all suites."""
