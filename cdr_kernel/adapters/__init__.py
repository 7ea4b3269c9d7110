"""Coverage-Differential Retrieval inside other people's frameworks: one module each, none of them imported here.

``crprotocol`` needs no package; ``langchain``, ``llamaindex``, ``haystack`` and ``lancedb`` need the extra of that
name (``llama-index`` with a hyphen).
"""
