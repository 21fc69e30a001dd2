"""Damage in every file and request that is read: is it refused clearly, harmless, or does it pass for good?"""
