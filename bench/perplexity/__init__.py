"""Bits a byte of held-out text: the embedded model beside compressors and bigrams."""
