"""Transfer of K/V between servers.

Public API: `Transfer`, `TransferParts`, `FleetAccess`, `SharedStores`, `LeaseBlocks`.
"""
