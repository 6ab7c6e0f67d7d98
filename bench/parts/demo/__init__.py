"""Parts that both demos share: conversations, and the lines that tell of them."""
