"""What tests of kvgraft and of its plug-ins share: tiny models of many architectures."""
