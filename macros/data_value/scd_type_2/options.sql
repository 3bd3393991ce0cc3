{#- SCD Type 2: what a model may say, checked, and its columns sorted by what they are. -#}

{% macro _scd2_own_columns() %}
    {{ return(['effective_from', 'effective_to', 'is_current', 'closed_by_delete', 'changes']) }}
{% endmacro %}


{% macro _scd2_require_options(options) %}
    {#- All that can be said before the columns of the model are known. -#}
    {%- do lakehouse_patterns.require_pattern_options('scd2', options) -%}
    {%- do lakehouse_patterns.require(
        lakehouse_patterns.as_list(config.get('unique_key')) | length > 0,
        "materialized='scd2' needs unique_key: the column or columns that identify an entity"
    ) -%}
    {%- do lakehouse_patterns.require(
        options.get('changed_at'),
        "meta.lakehouse_patterns.scd2 needs changed_at: the column with the time of the change in the source"
    ) -%}
    {%- for name in ['changed_at', 'sequence', 'is_deleted'] -%}
        {%- do lakehouse_patterns.require(
            options.get(name) is none or options.get(name) is string,
            name ~ ' of meta.lakehouse_patterns.scd2 must be the name of one column, got ' ~ options.get(name)
        ) -%}
    {%- endfor -%}
    {%- do lakehouse_patterns.require_one_of(
        'on_null_key', options.get('on_null_key', 'fail'), ['fail', 'quarantine']
    ) -%}
{% endmacro %}


{% macro _scd2_history(context) %}
    {#-
        The checked options, with the batch's columns sorted by what they are: key, tracked and untracked map column
        names to data types; `absent` are columns of the table that the model doesn't select. A change without a key
        belongs to nobody and one without a time has no place in the history: `incomplete` holds the rules for both.
    -#}
    {%- set options, types = context.options, context.types -%}
    {%- set names = lakehouse_patterns._scd2_names(options, types) -%}
    {%- do lakehouse_patterns._scd2_require_columns(names, types) -%}
    {%- set history = {
        'key': {},
        'tracked': {},
        'untracked': {},
        'absent': [],
        'tracks_all': not names.tracked,
        'changed_at': names.changed_at,
        'changed_at_type': types[names.changed_at],
        'sequence': names.sequence,
        'sequence_type': types.get(names.sequence),
        'is_deleted': names.is_deleted,
        'incomplete': {
            'relation': context.relation,
            'types': types,
            'partitions': names.partitions,
            'key': names.key,
            'nullable_key': [],
            'sequence': [names.changed_at],
            'is_deleted': names.is_deleted,
            'on_null_key': options.get('on_null_key', 'fail')
        }
    } -%}
    {%- for name, type in types.items() if name not in [names.changed_at, names.sequence, names.is_deleted] -%}
        {%- if name in names.key -%}
            {%- do history.key.update({name: type}) -%}
        {%- elif history.tracks_all or name in names.tracked -%}
            {%- do history.tracked.update({name: type}) -%}
        {%- else -%}
            {%- do history.untracked.update({name: type}) -%}
        {%- endif -%}
    {%- endfor -%}
    {%- do lakehouse_patterns.require(
        history.tracked | length > 0,
        "materialized='scd2' has no column to track: the model selects only " ~ (types | join(', '))
    ) -%}
    {%- do lakehouse_patterns._scd2_require_comparable(history) -%}
    {%- do lakehouse_patterns._scd2_require_typed(history) -%}
    {{ return(history) }}
{% endmacro %}


{% macro _scd2_names(options, types) %}
    {#- The columns that the options name, as the model spells them: a list, or one name (none without the option). -#}
    {%- set names = {} -%}
    {%- for role, given in {
        'key': config.get('unique_key'),
        'tracked': options.get('tracked_columns'),
        'partitions': config.get('partition_by')
    }.items() -%}
        {%- do names.update({role: lakehouse_patterns.spelled_names(types, lakehouse_patterns.as_list(given))}) -%}
    {%- endfor -%}
    {%- for role in ['changed_at', 'sequence', 'is_deleted'] -%}
        {%- set given = lakehouse_patterns.as_list(options.get(role)) -%}
        {%- do names.update({role: (lakehouse_patterns.spelled_names(types, given) or [none]) | first}) -%}
    {%- endfor -%}
    {{ return(names) }}
{% endmacro %}


{% macro _scd2_require_columns(names, types) %}
    {%- set feed_columns = [names.changed_at, names.sequence, names.is_deleted] | select | list -%}
    {%- do lakehouse_patterns.require_columns(types, names.key + feed_columns + names.tracked) -%}
    {%- do lakehouse_patterns.require_free_names(
        lakehouse_patterns.names_without_case(types, feed_columns), lakehouse_patterns._scd2_own_columns(),
        "materialized='scd2'"
    ) -%}
    {%- for name in names.partitions -%}
        {%- do lakehouse_patterns.require(
            name not in feed_columns,
            "partition_by of materialized='scd2' must name columns of its table, got '" ~ name
            ~ "', which the table lacks: changed_at is effective_from there, sequence and is_deleted are in changes"
        ) -%}
    {%- endfor -%}
    {%- do lakehouse_patterns.require_time(types, 'changed_at', names.changed_at) -%}
    {%- if names.is_deleted -%}
        {%- do lakehouse_patterns.require_boolean(types, 'is_deleted', names.is_deleted) -%}
    {%- endif -%}
{% endmacro %}


{% macro _scd2_require_comparable(history) %}
    {#- A version begins where a value differs. -#}
    {%- for columns in [history.key, history.tracked, history.untracked] -%}
        {%- for name, type in columns.items() -%}
            {%- do lakehouse_patterns.require(
                lakehouse_patterns.is_sortable(type),
                "materialized='scd2' can't compare '" ~ name ~ "', which is a " ~ type
                ~ ': select it as text, or leave it out'
            ) -%}
        {%- endfor -%}
    {%- endfor -%}
{% endmacro %}


{% macro _scd2_require_typed(history) %}
    {#- The columns that `changes` keeps need a type: Delta stores no untyped NULL inside of an array. -#}
    {%- set kept = {history.sequence: history.sequence_type} if history.sequence else {} -%}
    {%- do kept.update(history.untracked) -%}
    {%- for name, type in kept.items() -%}
        {%- do lakehouse_patterns.require(
            type != 'void',
            "materialized='scd2' can't keep '" ~ name ~ "', a NULL without a type: cast it in the model, as in "
            ~ 'cast(null as string)'
        ) -%}
    {%- endfor -%}
{% endmacro %}


{% macro _scd2_require_contract(history, batch) %}
    {#-
        A contract lists the columns of the table, which are not those that the model selects. It is checked before
        the table with quarantined rows is there.
    -#}
    {%- set rules, columns = {}, {} -%}
    {%- do rules.update(history.incomplete) -%}
    {%- do rules.update({'on_null_key': 'fail'}) -%}
    {%- do columns.update(history) -%}
    {%- do columns.update({'incomplete': rules}) -%}
    {%- do lakehouse_patterns.require_contract('(' ~ lakehouse_patterns._scd2_rows(columns, batch) ~ ')') -%}
{% endmacro %}
