"""Saves what tenants used, and makes statements from it.

Public API: `StatementBook` makes statements; `DayFiles` are its files, one per day;
`QuotaShadows` estimate what twice a quota would have saved.
"""
