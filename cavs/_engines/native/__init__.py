"""Engine `native`: runs levels in one call of compiled C++ on CPUs."""
