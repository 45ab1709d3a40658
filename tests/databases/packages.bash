# shellcheck shell=bash
# What the tests need from the system: how to see that it is there, and which Debian packages bring it.
# Sourced by tests/run and tests/databases/with.

# Servers live in the administrator's folders, which are not in the PATH of everybody.
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin

# Prints the folder of the newest PostgreSQL server. Debian keeps it out of PATH, one folder a version.
postgres_bin() {
    local folder
    for folder in $(printf '%s\n' /usr/lib/postgresql/*/bin | sort -rV) "$(pg_config --bindir 2>/dev/null)"; do
        if [[ -x $folder/initdb && -x $folder/postgres ]]; then
            printf '%s\n' "$folder"
            return
        fi
    done
    return 1
}

# Makes sure that everything named is there (compiler, postgres, mariadb): root installs what is missing,
# anybody else is told what it is.
require() {
    local need packages=()
    for need in "$@"; do
        case $need in
            compiler) command -v cc >/dev/null || packages+=(gcc libc6-dev) ;;
            postgres) postgres_bin >/dev/null || packages+=(postgresql) ;;
            # Only the programs: the package mariadb-server would also set up a service of the whole machine.
            mariadb)
                command -v mariadbd >/dev/null || packages+=(mariadb-server-core)
                command -v my_print_defaults >/dev/null || packages+=(mariadb-client-core)
                ;;
        esac
    done
    ((${#packages[@]})) || return 0
    if ((EUID)) || ! command -v apt-get >/dev/null; then
        cat >&2 <<MESSAGE
The tests need software that is missing here. Debian packages: ${packages[*]}
Install them, for example: sudo apt-get install --no-install-recommends ${packages[*]}
Databases that run elsewhere can be used instead: set SKY_TEST_POSTGRES_URL and SKY_TEST_MYSQL_URL.
MESSAGE
        return 1
    fi
    echo "Installing ${packages[*]}"
    local log
    # --no-remove: rather fail than throw out, say, a MySQL that somebody uses.
    if ! log=$({ apt-get -q -o DPkg::Lock::Timeout=120 update &&
        DEBIAN_FRONTEND=noninteractive apt-get -q -o DPkg::Lock::Timeout=120 install -y --no-install-recommends \
            --no-remove "${packages[@]}"; } </dev/null 2>&1); then
        printf '%s\n' "$log" "The packages ${packages[*]} could not be installed: see above." >&2
        return 1
    fi
}
