"""Reference router for prefill and decode in separate engines of vLLM; needs aiohttp."""

from kvxfer.proxy.config import ProxyConfig
from kvxfer.proxy.server import Proxy

__all__ = ["Proxy", "ProxyConfig"]
